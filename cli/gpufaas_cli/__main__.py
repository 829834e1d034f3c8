"""``python -m gpufaas_cli``: the CLI where no script was installed."""

from gpufaas_cli.main import main

if __name__ == "__main__":
    main()
