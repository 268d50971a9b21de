"""The clients are tested against a real server process."""

from server_process import served

__all__ = ["served"]
