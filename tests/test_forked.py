"""Programs that tests fork, `forked`."""

import os
import sys

import forked


def test_a_program_knows_the_server_whatever_its_environment():
    code = f"import os; print(os.environ['{forked.ADDRESS}'], os.environ['WHO'], os.environ.get('HOME'))"
    done = forked.run([sys.executable, "-c", code], env={"WHO": "you"}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [os.environ[forked.ADDRESS], "you", "None"]
