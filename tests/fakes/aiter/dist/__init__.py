"""Where aiter keeps what goes between GPUs."""
