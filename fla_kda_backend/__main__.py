"""What can be asked for on the command line? `python -m fla_kda_backend doctor`."""

import argparse
import sys

from fla_kda_backend import doctor


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fla_kda_backend")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "doctor",
        help="is the package healthy here? one page for a bug report",
        description="Examine this environment, try every path that can run here, and name the next step for every "
        "problem. Exits with 0 when healthy and 1 when not.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    command.add_argument("--no-triton", action="store_true", help="leave out FLA's own kernels, which tune themselves")
    options = parser.parse_args(arguments)
    return doctor.main(as_json=options.json, with_triton=not options.no_triton)


if __name__ == "__main__":
    sys.exit(main())
