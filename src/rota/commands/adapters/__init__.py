"""`rota adapters` looks at adapter folders, and changes the adapters of a running server."""
