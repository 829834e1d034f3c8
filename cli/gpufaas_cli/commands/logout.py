"""``gpufaas logout``."""

from pathlib import Path

from gpufaas_cli import config, declare, flags, output
from gpufaas_core.errors import GpufaasError


@declare.command("logout")
@flags.gateway_only
@flags.yaml_file
def command(gateway: str | None, yaml_file: Path | None) -> None:
    """
    Forget user and password of a gateway. The gateway itself is not asked.

    Examples:
      gpufaas logout
      gpufaas logout -g https://gateway.example.com
    """
    url = flags.gateway_url(gateway, yaml_file)
    if not config.remove_login(url):
        raise GpufaasError(f"there is no login for {url} in {config.config_file()}")
    output.show(f"credentials removed for {url}")
