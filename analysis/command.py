"""What fold-tables, fold-figures, fold-compare and fold-report share: mistakes are one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Container
from typing import NoReturn

from analysis.load import LoadError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise LoadError(f"{message}; {self.prog} --help shows how to call it")

    @staticmethod
    def numbers(known: Container[int]) -> Callable[[str], list[int]]:
        """A parser of "2,4" into known numbers."""

        def parse(text: str) -> list[int]:
            wanted = [int(part) for part in text.split(",")]
            if any(number not in known for number in wanted):
                raise ValueError
            return sorted(set(wanted))

        parse.__name__ = "list of numbers"  # argparse names it in its error
        return parse


def run_command(name: str, command: Callable[[list[str]], int]) -> int:
    """Run a command with the process's arguments; a user's mistake or a disk's refusal becomes one line and code 2."""
    try:
        return command(sys.argv[1:])
    except LoadError as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
    return 2
