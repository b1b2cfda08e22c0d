"""What tests of launch/ share: scripts that they write, addresses, and an SGLang whose server starts at once."""

import os
import shutil
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def copy_of_launch(folder: Path, python: str) -> Path:
    """Copy launch/ to ``folder``, with the script ``python`` as .venv/bin/python; its {python} is this interpreter."""
    shutil.copytree(LAUNCH, folder / "launch")
    for name in ("setup.py", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, folder)
    write_script(folder / ".venv/bin/python", python.replace("{python}", sys.executable))
    return folder


def free_port() -> int:
    """With the next one free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def listens(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def environment(**extra: str) -> dict[str, str]:
    foreign = ("SLURM_", "MASTER_", "CUDA_VISIBLE")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NNODES", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in names}
    return {**kept, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **extra}


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
