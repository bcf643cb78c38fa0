"""``python -m nemo_sspo`` is the ``nemo-sspo`` command; torchrun starts it this way."""

from nemo_sspo.cli import main

raise SystemExit(main())
