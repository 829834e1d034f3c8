"""The management routes that say what nodes provide to functions, for who builds bundles for them."""

from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response

from gpufaas_gateway.answers import json_answer, read_body, starting
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.wire import FunctionDeployment, parse

_PATH: Final = "/system/environments"


def add_environment_routes(app: FastAPI, deployer: Deployer) -> None:
    @app.get(_PATH)
    async def of_all_nodes() -> Response:
        return json_answer(msgspec.to_builtins(await deployer.environments()))

    @app.post(_PATH)
    async def of_nodes_for_a_function(request: Request) -> Response:
        asked = parse(FunctionDeployment, await read_body(request))
        if not deployer.catalogue.loaded:
            return starting()
        return json_answer(msgspec.to_builtins(await deployer.environments(asked.spec())))
