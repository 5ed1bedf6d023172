"""Connections to a server: those that send no request are closed."""
import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes a connection that for `patience` to twice as many seconds sends no whole head of a request."""

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(self)

    def _look(self, before: Any) -> None:
        """Closes the connection if it waits for the request that it waited for `before`, else looks again later."""
        now = self.cycle if self.conn.their_state is h11.IDLE else self
        if now is before is not self:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(self.patience, self._look, now)
