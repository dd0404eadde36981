"""`rota chat`: a conversation in the terminal, with any running server or with the built-in model."""
