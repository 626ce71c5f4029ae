"""HTTP requests and responses: routes, protocols, tokens, and the page at /."""
