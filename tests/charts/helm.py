"""
Helm itself, for the chart's tests: its Go library, in a process of its own.

    python tests/charts/helm.py lint CHART
    python tests/charts/helm.py install CHART RELEASE NAMESPACE KUBECONFIG VALUES    (values as JSON)

Prints what Helm returns as JSON; what it refuses is on stderr, with status 1.
"""

import asyncio
import json
import sys

from helm_sdkpy import Configuration, HelmError, Install, Lint


def main() -> None:
    command, chart, *more = sys.argv[1:]
    try:
        if command == "lint":
            found = asyncio.run(Lint(Configuration()).run(chart))
        else:
            release, namespace, kubeconfig, values = more
            configuration = Configuration(namespace=namespace, kubeconfig=kubeconfig)
            install = Install(configuration)
            found = asyncio.run(install.run(release, chart, values=json.loads(values), wait=False, timeout=20))
    except HelmError as exc:
        sys.exit(str(exc))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
