"""See :mod:`torchvision` here."""

from torchvision import of_any_name


def __getattr__(name: str) -> type:
    return of_any_name(name)
