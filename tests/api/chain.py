"""A chain started by `splitmodel up`, and its end."""
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("SPLITMODEL_BIN", pathlib.Path.home() / ".cache/splitmodel/target/release"))
MANIFEST = ROOT / "examples/smollm2.yaml"
LANES, CONTEXT = 4, 2048


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def eventually(check, what, seconds=60):
    """Waits until check() is true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"after {seconds} s still not so: {what}"
        time.sleep(0.05)


class Chain:
    """Starts a chain with its own state directory and waits until it serves."""

    def __init__(self, directory, stages, *flags, wait=True, manifest=MANIFEST, threads=1):
        self.port, self.stages, self.state = free_port(), stages, directory / "state"
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines = []
        # One thread by default: threads that wait for each other on busy cores are slow beyond all measure.
        command = [BIN / "splitmodel", "up", manifest, "--stages", str(stages), "--port", str(self.port),
                   "--state-dir", self.state, "--grace", "2", "--threads", str(threads), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.until(r"^ready: ")
            except BaseException:
                self.end(signal.SIGKILL)
                raise

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def find(self, pattern):
        return [m for line in list(self.lines) if (m := re.search(pattern, line))]

    def until(self, pattern, times=1):
        """Waits until so many lines of the output match."""
        def there():
            found = len(self.find(pattern)) >= times
            assert found or self.process.poll() is None, "\n".join(self.lines)
            return found
        eventually(there, f"{times} × {pattern!r} in the output", 180)

    def pid(self, stage):
        """The process that runs a stage now."""
        return int(self.find(rf"^stage {stage}: started \(process (\d+)\)")[-1][1])

    def end(self, how=signal.SIGINT):
        """Ends it; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(10)
        return code
