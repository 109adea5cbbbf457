"""`python -m grammar_service` is `grammar-service`."""

from grammar_service.cli import main

main()
