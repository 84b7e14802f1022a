"""The entry point of the `holmes` command. Ctrl-C ends the command without a traceback even during its imports."""

import signal


def main() -> None:
    """Run the `holmes` command."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from holmes_hpc import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
