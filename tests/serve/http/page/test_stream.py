"""The reader of server-sent events."""

import pytest

from .looking import OpenPage

pytestmark = pytest.mark.slow


def test_events_are_read_wherever_the_bytes_are_cut(open_page: OpenPage) -> None:
    page = open_page()
    lines = '\ufeff: a comment\r\ndata: {"a": "é 🙂"}\r\n\r\nid: 1\ndata:x\ndata: y\ndata\n\n'
    stream = lines + "data: p\r\ndata: q\r\n\r\ndata: r\r\revent: z\n\ndata: cut off"
    found = page.evaluate(
        """async (text) => {
          const { events } = await import('./page/stream.js');
          const bytes = new TextEncoder().encode(text);
          const read = async (pieces) => {
            const body = new ReadableStream({ start(c) { pieces.forEach((p) => c.enqueue(p)); c.close(); } });
            const all = [];
            for await (const data of events(body)) all.push(data);
            return JSON.stringify(all);
          };
          const ways = [[bytes], [...bytes].map((byte) => new Uint8Array([byte]))];
          for (let i = 1; i < bytes.length; i++) ways.push([bytes.slice(0, i), bytes.slice(i)]);
          return [...new Set(await Promise.all(ways.map(read)))];
        }""",
        stream,
    )
    assert found == ['["{\\"a\\": \\"é 🙂\\"}","x\\ny\\n","p\\nq","r"]']


def test_a_reader_that_leaves_early_cancels_the_stream(open_page: OpenPage) -> None:
    page = open_page()
    assert page.evaluate(
        """async () => {
          const { events } = await import('./page/stream.js');
          let cancelled;
          const gone = new Promise((resolve) => { cancelled = resolve; });
          const body = new ReadableStream({
            start(c) { c.enqueue(new TextEncoder().encode('data: 1\\n\\ndata: 2\\n\\n')); },
            cancel() { cancelled(true); },
          });
          for await (const data of events(body)) { if (data === '1') break; }
          return gone;
        }"""
    )
