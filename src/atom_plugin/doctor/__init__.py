"""`atom-plugin doctor`: finds what prevents a server from running our models, above all silent causes."""
