"""The yardstick: JSON parsed and serialised by Starlette on uvicorn, one process, and nothing else."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await request.json())


async def health(request: Request) -> JSONResponse:  # noqa: ARG001 - Starlette's
    return JSONResponse("OK")


app = Starlette(routes=[Route("/", echo, methods=["POST"]), Route("/healthz", health)])
uvicorn.run(app, port=int(sys.argv[2]), loop="uvloop", http="httptools", access_log=False, log_level="error")
