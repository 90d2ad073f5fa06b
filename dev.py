"""Set everything up and run it, on any machine with Python 3.10 or later and nothing else.

    python3 dev.py demo         the demonstration
    python3 dev.py test         the checks: format, lint, types, documentation, tests (further arguments go to pytest)
    python3 dev.py test --quick the same without the documentation and the slow tests: less than two minutes
    python3 dev.py docs         the documentation, into build/docs

All work in a virtual environment of their own, .venv beside this file, and make it where it is not there or not
up to date.
"""

# Written so that Python 3.6 and later can read it: an old one is told what is wrong.

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))

OLDEST = (3, 10)
# The one place where PyTorch is pinned. On Linux the default build brings CUDA; PIP_EXTRA_INDEX_URL can name an index
# with the CPU build of this version, which pip prefers.
TORCH = "torch==2.13.0"
# The Triton whose compiled layouts the tests were written for, where PyTorch does not bring its own.
TRITON = "triton>=3.6,<3.7; sys_platform == 'linux'"
QUICK = "--quick"
QUICK_EXAMPLES = "100"  # of the property tests, in place of 500
FOR_CHECKS = ["-e", ".[dev]", TRITON]
# Warnings are errors: a link that leads nowhere, a docstring that does not parse.
SPHINX = ("-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "docs", os.path.join("build", "docs"))


def main(argv):
    """Run the command named first."""
    if sys.version_info < OLDEST:
        return fail(f"Python {OLDEST[0]}.{OLDEST[1]} or later is needed; this is {sys.version.split()[0]}")
    commands = {"demo": demo, "test": test, "docs": docs}
    if not argv or argv[0] not in commands:
        print(__doc__.strip())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return commands[argv[0]](argv[1:])


def demo(arguments):
    """Install the package alone and run its demonstration."""
    status = set_up(["-e", "."], [])
    return status or python("-m", "normgrad", "demo", *arguments)


def test(arguments):
    """Install the package with what the checks need, and run them all; the tests come last."""
    status = set_up(FOR_CHECKS, [TORCH])
    if status:
        return status
    quick = QUICK in arguments
    chosen = [argument for argument in arguments if argument != QUICK]
    checks = [("-m", "ruff", "format", "--check", "."), ("-m", "ruff", "check", "."), ("-m", "mypy")]
    if quick:
        os.environ.setdefault("NORMGRAD_TEST_EXAMPLES", QUICK_EXAMPLES)
        checks.append(("-m", "pytest", "-n", "auto", "-m", "not slow", *chosen))
    else:
        checks += [SPHINX, ("-m", "pytest", "-n", "auto", *chosen)]
    statuses = [python(*check) for check in checks]
    return max(statuses, key=abs)


def docs(arguments):
    """Build the documentation."""
    status = set_up(FOR_CHECKS, [TORCH]) or python(*SPHINX, *arguments)
    if not status:
        say("open " + os.path.join(ROOT, "build", "docs", "index.html"))
    return status


def set_up(needed, wished):
    """A virtual environment with what is needed and, where this Python can have it, what is wished."""
    stamp = Stamp([*needed, *wished])
    if stamp.is_there():
        return 0
    if not same_python():
        status = make_environment()
        if status:
            return status
    if python("-m", "pip", "install", *needed):
        return fail("the installation failed: pip says why above")
    for requirement in wished:
        if python("-m", "pip", "install", "--only-binary", ":all:", requirement):
            say(f"{requirement} is not to be had here: what needs it is skipped")
            return 0  # and tried again next time
    stamp.put()
    return 0


def make_environment():
    """A fresh virtual environment."""
    shutil.rmtree(VENV, ignore_errors=True)
    say("making " + VENV)
    if subprocess.call([sys.executable, "-m", "venv", VENV]):
        shutil.rmtree(VENV, ignore_errors=True)
        return fail("Python's module venv does not work here (on Debian and Ubuntu: apt install python3-venv)")
    return 0


def same_python():
    """Whether the virtual environment is there and made by this version of Python."""
    if not os.path.exists(PYTHON):
        return False
    program = "import sys; print(sys.version)"
    try:
        return subprocess.check_output([PYTHON, "-c", program]).decode().strip() == sys.version
    except (OSError, subprocess.CalledProcessError):
        return False


class Stamp:
    """A note in the virtual environment that these requirements are met."""

    def __init__(self, requirements):
        name = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:8]
        self.path = os.path.join(VENV, "normgrad-" + name)
        with open(os.path.join(ROOT, "pyproject.toml"), "rb") as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
        self.text = "\n".join([sys.version, ROOT, digest])

    def is_there(self):
        """Whether it was put, and for this Python, this folder and this pyproject.toml."""
        try:
            with open(self.path) as stream:
                return stream.read() == self.text
        except OSError:
            return False

    def put(self):
        """Write it."""
        with open(self.path, "w") as stream:
            stream.write(self.text)


def python(*arguments):
    """Run the virtual environment's Python; its exit status."""
    say("python " + " ".join(arguments))
    # What the caller's shell says about other environments must not reach this one.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.call([PYTHON, *arguments], cwd=ROOT, env=environment)


def say(text):
    """Show progress."""
    print("== " + text, flush=True)


def fail(text):
    """Report why nothing was run."""
    print("dev.py: " + text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
