"""The management routes that tell builders of bundles what nodes provide: Python, wheels, packages."""

from typing import Final

from fastapi import APIRouter

from gpufaas_core.environment import Environment
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.spec import FunctionSpec
from gpufaas_gateway.typed_routes import router
from gpufaas_gateway.wire import FunctionDeployment

_PATH: Final = "/system/environments"


def environment_routes(deployer: Deployer) -> APIRouter:
    routes = router()

    @routes.get(_PATH)
    async def list_environments() -> list[Environment]:
        """Python, the wheels that it takes, and the packages of each node."""
        return await deployer.environments()

    @routes.post(_PATH)
    async def list_environments_for_a_function(asked: FunctionDeployment) -> list[Environment]:
        """The same, of the nodes on which the function may run."""
        return await deployer.environments(asked.to(FunctionSpec))

    return routes
