"""The `flashmap` command: its sub-commands, and how it ends.

Exit status 0: fine. 1: a finding or a failure, told in one message on stderr. 2: wrong usage.
Everything heavy is imported inside the commands, so that `flashmap --help` answers at once.
"""

import os
import sys

import typer

from flashmap.openmp import bound_spinning

from .bench import bench
from .demo import demo
from .doctor import doctor
from .generate import generate
from .release import release_app
from .train import train_app

app = typer.Typer(
    name="flashmap",
    help="Lossless speculative decoding with flow-map drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Start with: flashmap demo",
)
app.command(epilog="Example: flashmap demo")(demo)
app.command(
    epilog='Example: flashmap generate "Why is the sky blue?" --target smollm2-135m --draft '
    "smollm2-135m"
)(generate)
app.command(
    epilog="Example: flashmap bench --target smollm2-135m --draft smollm2-135m --prompts "
    "prompts.txt"
)(bench)
app.command(epilog="Example: flashmap doctor --json")(doctor)
app.add_typer(release_app, name="release")
app.add_typer(train_app, name="train")


def main() -> None:
    """Run the command line; never shows a traceback for what a user can mend."""
    bound_spinning(os.environ)
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has gone (flashmap ... | head). Nothing is left to say, and the
        # interpreter must not try to flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        _fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        if type(error).__name__ == "TrainingError":
            _fail(str(error))
        # torch.OutOfMemoryError, by name because importing torch for it would cost seconds.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(f"out of GPU memory: {error}. Use a smaller model, fewer tokens, or --device cpu")


def _fail(message: str) -> None:
    print(f"flashmap: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
