"""``python -m pytest_kvgate.cli``."""

from pytest_kvgate.cli import main

raise SystemExit(main())
