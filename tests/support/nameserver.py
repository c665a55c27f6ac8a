"""A name server on the loopback whose answers a test decides."""

from __future__ import annotations

import socket
import threading
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer:
    """Answers over UDP from `records` ((name, kind) → texts as in a zone file) by `rcode`; nothing at all while
    `silent`. A name that has no record of any kind does not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode = dns.rcode.NOERROR
        self.silent = False
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        address = self._socket.getsockname()
        self._stopping = True
        self._socket.sendto(b"", address)  # wakes the thread
        self._thread.join(10)
        self._socket.close()

    _stopping = False

    def _serve(self) -> None:
        while True:
            packet, peer = self._socket.recvfrom(4096)
            if self._stopping:
                return
            self.asked += 1
            if not self.silent:
                self._socket.sendto(self._answer(dns.message.from_wire(packet)), peer)

    def _answer(self, query: dns.message.Message) -> bytes:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.rcode)
        texts = self.records.get((name, kind), [])
        if self.rcode == dns.rcode.NOERROR:
            if texts:
                answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *texts))
            elif not any(known == name for known, _ in self.records):
                answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer.to_wire()
