/* reflection.c - grpc.reflection v1 and v1alpha (the same wire format, one handler) over the
 * embedded descriptor set.
 *
 * The descriptor set is our own, so a short walk suffices: length-delimited fields only, by number
 * (descriptor.proto). Every full name (messages, fields, oneofs, enums, values, services, methods)
 * is indexed to its file once per process. An answer carries the raw file with its transitive
 * imports. list_services names what this server serves. An error is an answer; the stream stays
 * open. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/rpc_internal.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "proto/descriptor_set.h"

/* protobuf-c's names of the cases of the answer and of the request */
#define ANSWER(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name
#define ASKED(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name

enum { MAX_FILES = 32, MAX_IMPORTS = 16, NAME_BYTES = 256 };
/* field numbers in descriptor.proto */
enum { SET_FILE = 1 };
enum {
    FILE_NAME = 1,
    FILE_PACKAGE = 2,
    FILE_IMPORT = 3,
    FILE_MESSAGE = 4,
    FILE_ENUM = 5,
    FILE_SERVICE = 6
};
enum {
    NAME = 1,
    MESSAGE_FIELD = 2,
    MESSAGE_NESTED = 3,
    MESSAGE_ENUM = 4,
    MESSAGE_ONEOF = 8,
    ENUM_VALUE = 2,
    SERVICE_METHOD = 2
};

struct range {
    const uint8_t *at;
    size_t n_bytes;
};

struct file {
    struct range bytes;
    char name[NAME_BYTES];
    char imports[MAX_IMPORTS][NAME_BYTES];
    size_t n_imports;
};

struct symbol {
    char *name;
    size_t file;
    bool is_message;
};

static struct {
    struct file files[MAX_FILES];
    size_t n_files;
    struct symbol *symbols;
    size_t n_symbols;
} catalog;

static uint64_t take_varint(struct range *s)
{
    uint64_t value = 0;
    for (unsigned shift = 0; s->n_bytes && shift < 64; shift += 7) {
        uint8_t byte = *s->at++;
        s->n_bytes--;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) break;
    }
    return value;
}

/* The next length-delimited field of a message; others are skipped. */
static bool next_field(struct range *s, unsigned *ret_number, struct range *ret_value)
{
    while (s->n_bytes) {
        uint64_t key = take_varint(s);
        size_t n;
        switch (key & 7) {
        case 0:
            take_varint(s);
            continue;
        case 1:
            n = 8;
            break;
        case 5:
            n = 4;
            break;
        case 2:
            n = take_varint(s);
            break;
        default:
            return false;
        }
        if (n > s->n_bytes) return false;
        *ret_value = (struct range){s->at, n};
        s->at += n;
        s->n_bytes -= n;
        if ((key & 7) != 2) continue;
        *ret_number = (unsigned)(key >> 3);
        return true;
    }
    return false;
}

static void copy_text(char *to, struct range text)
{
    size_t n = text.n_bytes < NAME_BYTES - 1 ? text.n_bytes : NAME_BYTES - 1;
    memcpy(to, text.at, n);
    to[n] = 0;
}

/* Finds the name (field 1) of a descriptor and indexes scope.name. */
static void add_symbol(const char *scope, struct range descriptor, bool is_message, char *ret_full)
{
    struct range rest = descriptor, value;
    unsigned number;
    ret_full[0] = 0;
    while (next_field(&rest, &number, &value))
        if (number == NAME) {
            char name[NAME_BYTES];
            copy_text(name, value);
            if (snprintf(ret_full, NAME_BYTES, "%s%s%s", scope, *scope ? "." : "", name) >=
                NAME_BYTES)
                ret_full[NAME_BYTES - 1] = 0;
            break;
        }
    struct symbol *grown = realloc(catalog.symbols, (catalog.n_symbols + 1) * sizeof *grown);
    TD_ASSERT(grown != NULL);
    catalog.symbols = grown;
    catalog.symbols[catalog.n_symbols++] =
        (struct symbol){td_rpc_strdup(ret_full), catalog.n_files, is_message};
}

static void add_enum(const char *scope, struct range descriptor)
{
    char full[NAME_BYTES], value_name[NAME_BYTES];
    struct range value;
    unsigned number;
    add_symbol(scope, descriptor, false, full);
    while (next_field(&descriptor, &number, &value)) /* values live beside their enum */
        if (number == ENUM_VALUE) add_symbol(scope, value, false, value_name);
}

static void add_message(const char *scope, struct range descriptor)
{
    char full[NAME_BYTES], member[NAME_BYTES];
    struct range value;
    unsigned number;
    add_symbol(scope, descriptor, true, full);
    while (next_field(&descriptor, &number, &value)) {
        if (number == MESSAGE_FIELD || number == MESSAGE_ONEOF)
            add_symbol(full, value, false, member);
        if (number == MESSAGE_NESTED) add_message(full, value);
        if (number == MESSAGE_ENUM) add_enum(full, value);
    }
}

static void add_service(const char *scope, struct range descriptor)
{
    char full[NAME_BYTES], member[NAME_BYTES];
    struct range value;
    unsigned number;
    add_symbol(scope, descriptor, false, full);
    while (next_field(&descriptor, &number, &value))
        if (number == SERVICE_METHOD) add_symbol(full, value, false, member);
}

static void build_catalog(void)
{
    struct range set = {td_proto_descriptor_set, td_proto_descriptor_set_bytes}, bytes;
    unsigned number;
    while (next_field(&set, &number, &bytes)) {
        if (number != SET_FILE) continue;
        TD_ASSERT(catalog.n_files < MAX_FILES);
        struct file *file = &catalog.files[catalog.n_files];
        char package[NAME_BYTES] = "";
        struct range rest = bytes, value;
        file->bytes = bytes;
        while (next_field(&rest, &number, &value)) {
            /* protoc's output begins with name and package, but the format does not promise it */
            if (number == FILE_NAME) copy_text(file->name, value);
            if (number == FILE_PACKAGE) copy_text(package, value);
            if (number == FILE_IMPORT) {
                TD_ASSERT(file->n_imports < MAX_IMPORTS);
                copy_text(file->imports[file->n_imports++], value);
            }
        }
        rest = bytes;
        while (next_field(&rest, &number, &value)) {
            if (number == FILE_MESSAGE) add_message(package, value);
            if (number == FILE_ENUM) add_enum(package, value);
            if (number == FILE_SERVICE) add_service(package, value);
        }
        catalog.n_files++;
    }
}

static size_t find_file(const char *name)
{
    size_t i = 0;
    while (i < catalog.n_files && strcmp(catalog.files[i].name, name) != 0) i++;
    return i;
}

static const struct symbol *find_symbol(const char *name)
{
    for (size_t i = 0; i < catalog.n_symbols; i++)
        if (strcmp(catalog.symbols[i].name, name) == 0) return &catalog.symbols[i];
    return NULL;
}

static void collect(size_t index, bool *seen, ProtobufCBinaryData *files, size_t *n_files)
{
    if (index >= catalog.n_files || seen[index]) return;
    const struct file *file = &catalog.files[index];
    seen[index] = true;
    files[(*n_files)++] = (ProtobufCBinaryData){file->bytes.n_bytes, (uint8_t *)file->bytes.at};
    for (size_t i = 0; i < file->n_imports; i++)
        collect(find_file(file->imports[i]), seen, files, n_files);
}

/* Sends the names of the services that this server has. */
static void send_services(struct td_rpc_call *call, const struct td_rpc_server *server,
                          Grpc__Reflection__V1__ServerReflectionResponse *response)
{
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    size_t n = server->routes.n_services;
    Grpc__Reflection__V1__ServiceResponse *services = td_rpc_alloc(n * sizeof *services);
    list.service = td_rpc_alloc(n * sizeof *list.service);
    for (size_t i = 0; i < n; i++) {
        grpc__reflection__v1__service_response__init(&services[i]);
        services[i].name = server->routes.services[i];
        list.service[i] = &services[i];
    }
    list.n_service = n;
    response->message_response_case = ANSWER(LIST_SERVICES_RESPONSE);
    response->list_services_response = &list;
    td_rpc_call_send(call, &response->base);
    free(list.service);
    free(services);
}

static void send_files(struct td_rpc_call *call, size_t index,
                       Grpc__Reflection__V1__ServerReflectionResponse *response)
{
    Grpc__Reflection__V1__FileDescriptorResponse files =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    ProtobufCBinaryData found[MAX_FILES];
    bool seen[MAX_FILES] = {false};
    files.file_descriptor_proto = found;
    collect(index, seen, found, &files.n_file_descriptor_proto);
    response->message_response_case = ANSWER(FILE_DESCRIPTOR_RESPONSE);
    response->file_descriptor_response = &files;
    td_rpc_call_send(call, &response->base);
}

/* No message of ours has extensions: the list is empty. */
static void send_no_extensions(struct td_rpc_call *call, char *type,
                               Grpc__Reflection__V1__ServerReflectionResponse *response)
{
    Grpc__Reflection__V1__ExtensionNumberResponse numbers =
        GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;
    numbers.base_type_name = type;
    response->message_response_case = ANSWER(ALL_EXTENSION_NUMBERS_RESPONSE);
    response->all_extension_numbers_response = &numbers;
    td_rpc_call_send(call, &response->base);
}

static void send_error(struct td_rpc_call *call, enum td_code code, char *why,
                       Grpc__Reflection__V1__ServerReflectionResponse *response)
{
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
    /* "%.200s" may have cut a character in half: the answer must stay UTF-8 */
    for (char *c = why; *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '?';
    error.error_code = code;
    error.error_message = why;
    response->message_response_case = ANSWER(ERROR_RESPONSE);
    response->error_response = &error;
    td_rpc_call_send(call, &response->base);
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, build_catalog);
    const struct td_rpc_server *server = ctx;
    if (!msg) {
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
        return;
    }
    const Grpc__Reflection__V1__ServerReflectionRequest *request = (const void *)msg;
    Grpc__Reflection__V1__ServerReflectionResponse response =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    const struct symbol *symbol;
    size_t index = catalog.n_files;
    enum td_code code = TD_CODE_NOT_FOUND;
    char why[NAME_BYTES + 64] = "";

    response.valid_host = request->host;
    response.original_request = (Grpc__Reflection__V1__ServerReflectionRequest *)request;
    switch (request->message_request_case) {
    case ASKED(LIST_SERVICES):
        send_services(call, server, &response);
        return;
    case ASKED(FILE_BY_FILENAME):
        index = find_file(request->file_by_filename);
        snprintf(why, sizeof why, "no file %.200s", request->file_by_filename);
        break;
    case ASKED(FILE_CONTAINING_SYMBOL):
        symbol = find_symbol(request->file_containing_symbol);
        if (symbol) index = symbol->file;
        snprintf(why, sizeof why, "no symbol %.200s", request->file_containing_symbol);
        break;
    case ASKED(FILE_CONTAINING_EXTENSION):
        snprintf(why, sizeof why, "there are no extensions");
        break;
    case ASKED(ALL_EXTENSION_NUMBERS_OF_TYPE):
        symbol = find_symbol(request->all_extension_numbers_of_type);
        if (symbol && symbol->is_message) {
            send_no_extensions(call, request->all_extension_numbers_of_type, &response);
            return;
        }
        snprintf(why, sizeof why, "no message %.200s", request->all_extension_numbers_of_type);
        break;
    default:
        code = TD_CODE_UNIMPLEMENTED;
        snprintf(why, sizeof why, "unknown reflection request");
    }
    if (index < catalog.n_files)
        send_files(call, index, &response);
    else
        send_error(call, code, why, &response);
}

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

const struct td_rpc_method td_rpc_reflection_methods[] = {
    {.path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
     .request = &grpc__reflection__v1__server_reflection_request__descriptor,
     .client_streaming = true,
     .on_message = on_message,
     .on_end = on_end},
    {.path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     .request = &grpc__reflection__v1__server_reflection_request__descriptor,
     .client_streaming = true,
     .on_message = on_message,
     .on_end = on_end},
    {0},
};
