/* keys.c - see terminal.h: what a terminal sends for keys, as the line editor shall see it.
 *
 *   START --ESC--> ESCAPE --'['--> CSI --final byte--> START
 *                    |----'O'--> SS3 --any byte--> START
 *                    '--any other byte: Meta and that key--> START */
#include <stdlib.h>
#include <string.h>

#include "cli/terminal.h"

enum { START, ESCAPE, CSI, SS3 };
enum { CTRL_A = 1, CTRL_B, CTRL_D = 4, CTRL_E, CTRL_F, CTRL_N = 14, CTRL_P = 16, CTRL_V = 22 };
enum { ESC = 27 };

static size_t one(wchar_t *ret, wchar_t c)
{
    ret[0] = c;
    return 1;
}

static size_t two(wchar_t *ret, wchar_t a, wchar_t b)
{
    ret[0] = a;
    ret[1] = b;
    return 2;
}

/* Arrows, Home and End; with a modifier (Ctrl, Alt, Shift) left and right go by words. */
static size_t letter(uint8_t final, bool is_modified, wchar_t *ret)
{
    switch (final) {
    case 'A':
        return one(ret, CTRL_P);
    case 'B':
        return one(ret, CTRL_N);
    case 'C':
        return is_modified ? two(ret, ESC, 'f') : one(ret, CTRL_F);
    case 'D':
        return is_modified ? two(ret, ESC, 'b') : one(ret, CTRL_B);
    case 'H':
        return one(ret, CTRL_A);
    case 'F':
        return one(ret, CTRL_E);
    }
    return 0;
}

/* ESC [ NUMBER ~ */
static size_t numbered(struct cli_keys *k, wchar_t *ret)
{
    switch (strtol(k->sequence, NULL, 10)) {
    case 1:
    case 7:
        return one(ret, CTRL_A);
    case 4:
    case 8:
        return one(ret, CTRL_E);
    case 3: /* Delete: bound to what Ctrl-D does inside a line, but it never ends the input */
        return two(ret, ESC, CTRL_D);
    case 200:
        k->is_pasting = true;
        return 0;
    case 201:
        k->is_pasting = false;
        return 0;
    }
    return 0;
}

static size_t control(struct cli_keys *k, uint8_t byte, wchar_t *ret)
{
    if (byte == ESC) {
        k->state = ESCAPE;
        k->n_sequence = 0;
        return 0;
    }
    if (!k->is_pasting) return one(ret, byte);
    if (byte == '\r' || byte == '\n') return two(ret, CTRL_V, '\n');
    return byte == '\t' ? two(ret, CTRL_V, '\t') : 0;
}

static size_t plain(struct cli_keys *k, uint8_t byte, wchar_t *ret)
{
    if (k->n_more && (byte & 0xC0) == 0x80) {
        k->character = k->character << 6 | (byte & 0x3F);
        if (--k->n_more) return 0;
        bool is_valid = k->character >= 0xA0 && k->character <= 0x10FFFF &&
                        (k->character < 0xD800 || k->character > 0xDFFF);
        return is_valid ? one(ret, (wchar_t)k->character) : 0;
    }
    k->n_more = 0;
    if (byte < 0x20) return control(k, byte, ret);
    if (byte < 0x80) return one(ret, byte);
    if (byte >= 0xC2 && byte < 0xF5) {
        k->n_more = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
        k->character = byte & (0x3Fu >> k->n_more);
    }
    return 0;
}

size_t cli_keys_feed(struct cli_keys *k, uint8_t byte, wchar_t ret[CLI_KEYS_MAX])
{
    int state = k->state;
    if (state == START) return plain(k, byte, ret);
    k->state = START;
    if (state == SS3) return k->is_pasting ? 0 : letter(byte, false, ret);
    if (state == ESCAPE) {
        if (byte == '[') k->state = CSI;
        if (byte == 'O') k->state = SS3;
        if (byte == ESC) k->state = ESCAPE;
        if (k->state != START || k->is_pasting || byte >= 0x80) return 0;
        return two(ret, ESC, byte);
    }
    if (byte >= 0x40 && byte <= 0x7E) {
        k->sequence[k->n_sequence] = 0;
        if (byte == '~') return numbered(k, ret);
        return k->is_pasting ? 0 : letter(byte, strchr(k->sequence, ';') != NULL, ret);
    }
    if (byte < 0x20) return plain(k, byte, ret); /* no sequence: the key for itself */
    k->state = CSI;
    if (k->n_sequence + 1 < sizeof k->sequence) k->sequence[k->n_sequence++] = (char)byte;
    return 0;
}
