import sys

from asyncrl.audit import main

sys.exit(main())
