"""What every test needs to run against the installed kvmnn, whatever the working directory."""

import os

# Child processes would otherwise import the checkout's kvmnn/, whose kernels are not compiled, from their working
# directory.
os.environ["PYTHONSAFEPATH"] = "1"
