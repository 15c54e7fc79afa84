"""Programs that end with the process that started them, even if that is killed by kill -9.

    with Program(["lean", "--server"], stdin=PIPE, stdout=PIPE, text=True) as program: ...

For environments and rewards that keep a program running. On Linux, PR_SET_PDEATHSIG would follow
the thread that started the program; the end of a pipe follows the process.
"""

import contextlib
import os
import shutil
import subprocess

# The shell starts the program, and a guard that waits for the end of the pipe $1: then it kills the
# whole process group, also what the program has left in the background. `read` is a shell builtin,
# so the guard is one process. 9 keeps the standard input, which a shell takes from what it starts
# with &; the guard closes it, as it may outlive the program, whose input must then be broken
GUARD = """exec 8< "/dev/fd/$1" 9<&0; shift
"$@" <&9 8<&- 9<&- & program=$!
{ read -r _ <&8; kill -KILL 0; } 9<&- > /dev/null 2>&1 &
wait $program"""


class Program(subprocess.Popen):
    """A subprocess.Popen of `command`, a list, in a new process group, to which signals go.
    All of the group ends with this process, with `with`, or by kill(). A signal that ends it gives
    the exit status 128 + its number. Raises FileNotFoundError if there is no such program."""

    def __init__(self, command, **options):
        if not shutil.which(command[0]):
            raise FileNotFoundError(f"there is no program {command[0]!r}")
        read, write = os.pipe()
        self.pipe = os.fdopen(write, "wb")  # nobody else has this end
        guarded = ["sh", "-c", GUARD, "sh", str(read), *command]
        try:
            super().__init__(guarded, pass_fds=[read], start_new_session=True, **options)
        finally:
            os.close(read)

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.killpg(self.pid, number)

    def kill(self):
        """Kills the whole group, and waits for its end."""
        super().kill()
        self.wait()
        self.pipe.close()

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)
