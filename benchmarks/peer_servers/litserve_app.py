"""LitServe: two HTTP servers, two worker processes, and its fast queue between them (ZeroMQ)."""

import sys
from typing import Any

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # no annotation: LitServe would read the body by it
        return request

    def predict(self, x: Any) -> Any:
        return x

    def encode_response(self, output: Any) -> Any:
        return output


class Convnet(Echo):
    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's
        import convnet

        self.answer, self.model = convnet.answer, convnet.load()

    def predict(self, x: Any) -> Any:
        return self.answer(self.model, x)


if __name__ == "__main__":
    work, port = sys.argv[1:]
    api = {"echo": Echo, "convnet": Convnet}[work]()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=2, fast_queue=True)
    server.run(
        host="127.0.0.1", port=int(port), num_api_servers=2, generate_client_file=False, log_level="error",
        access_log=False,
    )  # fmt: skip
