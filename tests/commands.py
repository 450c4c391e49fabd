"""Commands of tests, in this process, which has loaded torch already."""

from typer.testing import CliRunner

from coserve import app


def coserve(*words, check=None):
    """Outcome of a command at its end. ``check``: the exit code that it has to have."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if check is not None:
        assert done.exit_code == check, (done.output, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert "Traceback" not in done.stderr
    return done
