"""`python -m shoal`: the command line, for `torchrun -m shoal train ...`."""

from shoal.cli import main

if __name__ == "__main__":
    main()
