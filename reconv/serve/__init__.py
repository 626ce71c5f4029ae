"""The HTTP server: predictions of trained models, and a page to try them."""
