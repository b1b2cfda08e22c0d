"""A package named sglang whose server starts at once; its flags --dies and --never-ready say what else it does."""

from pathlib import Path

# has a child that does not listen to SIGTERM, and ends by itself if a test fails to end it
SERVER = """
import signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

signal.alarm(900)
if "--dies" in sys.argv:
    sys.exit("no such kernel")
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"
subprocess.Popen([sys.executable, "-c", deaf])

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never-ready" in sys.argv else 200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def write_quick_sglang(folder: Path) -> None:
    """Make ``folder`` a module path with that package, and a model that it can serve."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text("")
    (folder / "sglang/launch_server.py").write_text(SERVER)
    (folder / "config.json").write_text("{}")
