"""
``gpufaas local-run``: one function on this machine, without deploying it to the platform of others.

A function that runs as a process gets a platform of its own while it runs: the same code and the same limits hold there
as on any platform. A container image is run by docker.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from gpufaas import GatewayUnreachable, Refused
from gpufaas_cli import build_flags, declare, flags, output, pipeline
from gpufaas_cli.images import Building, check_engine
from gpufaas_cli.stack import Stack, StackFunction
from gpufaas_cli.subprocess_lines import end_as_by_ctrl_c
from gpufaas_cli.watching import watch
from gpufaas_core.errors import GpufaasError
from gpufaas_core.files import remove_tree
from gpufaas_core.units import Seconds

_DEPLOYED_S: Final[Seconds] = 0.2
_STOP_S: Final[Seconds] = 15.0
_CONTAINER_PORT: Final = 8080


@declare.command("local-run")
@click.argument("name", required=False)
@flags.yaml_file
@flags.envsubst
@click.option("-p", "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free port.")
@build_flags.env
@click.option("--device", "devices", multiple=True, metavar="DEVICE", help="As of 'gpufaas serve'; repeatable.")
@click.option("--watch", "watches", is_flag=True, help="Build it again whenever one of its files changes.")
@click.option("--print", "prints", is_flag=True, help="Containers: print the docker command, and do nothing.")
@click.option("--build/--no-build", "builds", default=True, help="Containers: build the image first. [default: build]")
@click.option("--network", metavar="NAME", help="Containers: docker network.")
@build_flags.build_arg
def command(
    name: str | None, yaml_file: Path | None, envsubst: bool, port: int, env: dict[str, str], devices: tuple[str, ...],
    watches: bool, prints: bool, builds: bool, network: str | None, build_args: dict[str, str],
) -> None:  # fmt: skip
    """
    Run one function of the stack file on this machine until Ctrl-C. NAME may be left out where there is only one.

    Examples:
      gpufaas local-run hello
      gpufaas local-run hello -p 0 -e LOG=debug
      gpufaas local-run hello --watch
      gpufaas local-run digits --device cpu:0=4GiB
    """
    stack, functions = flags.Selection((name,) if name else (), yaml_file, envsubst=envsubst).read()
    if len(functions) > 1:
        raise click.UsageError(f"name the function to run: one of {', '.join(each.name for each in functions)}")
    function, building = functions[0], Building(build_args=build_args)
    if not function.is_built or not pipeline.makes_bundles(stack, functions):
        command = _docker_run(
            function, pipeline.image_of(stack, function, "latest"), port or _free_port(), env, network
        )
        if prints:
            output.show(" ".join(command))
            return
        check_engine(f"running {function.name}, which is a container,")
        if builds and function.is_built:
            with flags.connect(flags.gateway_url(None, yaml_file)) as client:
                pipeline.run(stack, [function], pipeline.Steps(), client, building)
        _run_container(function, command)
        return
    if function.constraints:
        output.note(f"Ignored in a local run: constraints {', '.join(function.constraints)}")
    with _platform(port, devices) as (url, process), flags.client_of(url) as client:
        overrides, steps = pipeline.Overrides(env=env), pipeline.Steps(push=True, deploy=True)

        def act(stack: Stack, functions: list[StackFunction]) -> None:
            # Constraints name machines and devices of where it will run.
            here = [dataclasses.replace(each, constraints=()) for each in functions]
            pipeline.run(stack, here, steps, client, building, overrides)

        # A daemon: it ends with the platform, or with this process, and leaves nothing behind.
        threading.Thread(target=_show_logs, args=(url, function.name), daemon=True).start()
        if watches:
            watch(flags.Selection((function.name,), yaml_file, envsubst=envsubst).read, act)
            return
        act(stack, functions)
        output.show(f"Running {function.name} at {url}/function/{function.name}; Ctrl-C ends it.")
        try:
            process.wait()
        except KeyboardInterrupt:
            return
    raise GpufaasError(f"the platform that ran {function.name} ended with status {process.returncode}: see above")


def _show_logs(url: str, name: str) -> None:
    """Write what the function prints to stderr, from its first deployment on."""
    while True:
        try:
            with flags.client_of(url) as client, client.logs(name, follow=True) as lines:
                for line in lines:
                    output.note(line["text"].rstrip("\n"))
                return
        except Refused:
            time.sleep(_DEPLOYED_S)  # it is not deployed yet, and the gateway has no route that waits for that
        except GatewayUnreachable:
            return


@contextlib.contextmanager
def _platform(port: int, devices: tuple[str, ...]) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Give the URL of a new platform, which is removed afterwards with all that it stored."""
    data = tempfile.mkdtemp(prefix="gpufaas-local-run-")
    command = [sys.executable, "-P", "-m", "gpufaas_cli", "serve", "--port", str(port or _free_port()), "--data", data]
    command += [word for each in devices for word in ("--device", each)]
    # In a session of its own: Ctrl-C reaches this process only, which then stops the platform. So do other ends of it.
    end_as_by_ctrl_c()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield _ready(process), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        remove_tree(Path(data))


def _ready(process: "subprocess.Popen[str]") -> str:
    """Read the output of `serve` until it is ready; return its URL. It ends by itself when it cannot start."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        words = line.split()
        if "gateway" in words:
            url = next((each for each in words if each.startswith("http://")), "")
        if line.startswith("ready") and url:
            return url
    raise GpufaasError("the platform for this run did not start: it says why above")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _run_container(function: StackFunction, command: list[str]) -> None:
    address = next(each for each in command if each.startswith("-p=")).removeprefix("-p=").rpartition(":")[0]
    output.show(f"Starting local-run for {function.name} on: http://{address}; Ctrl-C ends it.")
    try:
        done = subprocess.run(command, check=False)
    except KeyboardInterrupt:
        return
    if done.returncode:
        raise GpufaasError(f"docker ended with status {done.returncode}: it says why above")


def _docker_run(function: StackFunction, image: str, port: int, env: dict[str, str], network: str | None) -> list[str]:
    """Secrets are files of ./.secrets here, as faas-cli has it."""
    command = ["docker", "run", "--rm", "-i", f"--name={function.name}-{secrets.token_hex(3)}"]
    command += [f"-p=127.0.0.1:{port}:{_CONTAINER_PORT}"]
    if network:
        command.append(f"--network={network}")
    if function.readonly_root_filesystem:
        command += ["--read-only", "--tmpfs=/tmp"]
    if memory := function.limits.get("memory"):
        command.append(f"--memory={memory.removesuffix('i').lower()}")
    if (gpus := function.limits.get("nvidia.com/gpu", "0")) not in ("", "0"):
        command.append(f"--gpus={gpus}")
    environment = {
        "GPUFAAS_SCRATCH": "/tmp",
        **({"fprocess": function.fprocess} if function.fprocess else {}),
        **function.environment,
        **env,
    }
    command += [f"-e={key}={value}" for key, value in environment.items()]
    for each in function.secrets:
        file = Path(".secrets", each)
        if not file.is_file():
            raise GpufaasError(f"{function.name} needs the secret {each}: put its value into {file} for local runs")
        command.append(f"-v={file.absolute()}:/var/openfaas/secrets/{each}:ro")
    return [*command, image]
