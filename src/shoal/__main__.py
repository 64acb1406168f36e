"""`python -m shoal`: the command line, for `torchrun -m shoal train ...`."""

from shoal.app.cli import main

if __name__ == "__main__":
    main()
