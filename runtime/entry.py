"""The console command `hotcold`: from its first line on, Ctrl-C ends it quietly.

In: the command line. Out: an exit status. Next: cli.py, whose imports take the time in which this matters.
"""

import gc


def main() -> int:
    """What pip's script calls."""
    try:
        from hotcold.runtime import cli

        status = cli.main()
        gc.freeze()  # the process ends: to look at all objects once more takes a quarter of a second
        return status
    except KeyboardInterrupt:  # cli.main() tells its own; this one came before or after
        return 130
