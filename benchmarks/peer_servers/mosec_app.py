"""mosec: its front end in Rust, two worker processes."""

import sys
from typing import Any

import mosec


class Echo(mosec.Worker):
    def forward(self, data: Any) -> Any:
        return data


class Convnet(mosec.Worker):
    def __init__(self) -> None:
        import convnet

        self.answer, self.model = convnet.answer, convnet.load()

    def forward(self, data: Any) -> Any:
        return self.answer(self.model, data)


if __name__ == "__main__":  # its workers import this file, too
    work, port = sys.argv[1:]
    sys.argv = [sys.argv[0], "--address", "127.0.0.1", "--port", port, "--timeout", "60000", "--log-level", "warning"]
    server = mosec.Server()
    server.append_worker({"echo": Echo, "convnet": Convnet}[work], num=2)
    server.run()
