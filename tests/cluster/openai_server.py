"""A scripted server with the OpenAI completions API on loopback, out of the standard library:
what it answers to which request is the test's."""
import http.server
import json
import ssl
import threading


def chunk(text, finish=None, **more):
    """One event of a stream as a real server writes it: characters as they are, not escaped."""
    event = {
        "id": "cmpl-1", "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], "usage": None
    }
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt, completion, cached=None):
    u = {
        "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion
    }
    if cached is not None:
        u["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps({"choices": [], "usage": u}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Answer(http.server.BaseHTTPRequestHandler):
    """What a script gets: send() for whole answers, start(), write() and end() for streams."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format, *args):
        pass

    def send(self, status, body, kind="application/json", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def start(self, kind="text/event-stream; charset=utf-8"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def write(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def end(self):
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def stream(self, events, cut=None):
        """All of it, in pieces of `cut` bytes when given."""
        self.start()
        data = b"".join(events)
        for at in range(0, len(data), cut or len(data)):
            self.write(data[at:at + (cut or len(data))])
        self.end()

    def hang_up(self):
        """Here and now, in the middle of what was begun."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)

    def do_GET(self):
        self.server.owner.keys.add(self.headers["Authorization"])
        self.send(*self.server.owner.models)

    def do_POST(self):
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with owner.lock:
            index = len(owner.bodies)
            owner.bodies.append(body)
            owner.paths.append(self.path)
            owner.keys.add(self.headers["Authorization"])
        owner.got.set()
        try:
            owner.script(self, index, body)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            with owner.lock:
                owner.n_gone += 1


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    block_on_close = False

    def process_request_thread(self, request, client_address):
        with self.owner.lock:
            self.owner.n_connections += 1
        super().process_request_thread(request, client_address)

    def handle_error(self, request, client_address):
        pass  # a client that goes


class OpenAI:
    """with OpenAI(script) as s: s.url, s.bodies. script(answer, index, body) answers the POST of
    that number."""
    def __init__(self, script, models=(200, {
        "data": [{"id": "some/model", "max_model_len": 4096, "meta": {"n_vocab": 500}}]
    }), tls=None):
        self.script, self.models = script, models
        self.lock, self.got, self.release = threading.Lock(), threading.Event(), threading.Event()
        self.keys = set()  # what all requests said they are: Authorization
        self.bodies, self.paths, self.n_connections, self.n_gone = [], [], 0, 0
        self.listener = Listener(("127.0.0.1", 0), Answer)
        self.listener.owner = self
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.listener.socket = context.wrap_socket(self.listener.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.listener.server_address[1]}"
        self.thread = threading.Thread(target=self.listener.serve_forever,
                                       kwargs={"poll_interval": 0.05})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self.listener.shutdown()
        self.thread.join()
        self.listener.server_close()
