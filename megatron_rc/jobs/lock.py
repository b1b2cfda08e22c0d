"""The lock of a folder: it ends with the process that holds it, however that ends."""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system answers that knows no locks, as Lustre without its option flock."""


@contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[str]:
    """Hold the lock of ``file`` within the block, after all others with ``wait``.

    Yields "", or who holds the lock since when, if another process does.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock.seek(0)
            yield lock.read().strip() or "another process"
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"{file.parent} is on a file system without locks: start no second job there", file=sys.stderr)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        yield ""
