"""Ray Serve: two replicas. What is in front of them is chosen by Ray's own environment variables."""

import signal
import sys
from typing import Any

import ray
from ray import serve
from starlette.requests import Request


class Echo:
    async def __call__(self, request: Request) -> Any:
        return await request.json()


class Convnet:
    def __init__(self) -> None:
        import convnet

        self.answer, self.model = convnet.answer, convnet.load()

    async def __call__(self, request: Request) -> Any:
        return self.answer(self.model, await request.json())


if __name__ == "__main__":
    work, port = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    replicas = {"num_replicas": 2, "max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0.5}}
    deployment = serve.deployment(**replicas)({"echo": Echo, "convnet": Convnet}[work])
    serve.run(deployment.bind(), route_prefix="/")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        ray.shutdown()
