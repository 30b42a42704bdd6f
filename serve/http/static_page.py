"""The page at ``/``: a fixed list of files from this package, each with a fixed type, read once."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PARTS = ("page.css", "icon.svg", *(f"{name}.js" for name in (
    "answer", "api", "app", "depth", "examples", "histogram", "pane", "shade", "stream",
)))  # fmt: skip
FILES = {  # path -> file and type
    "/": ("index.html", "text/html; charset=utf-8"),
    **{f"/page/{name}": (name, TYPES[Path(name).suffix]) for name in PARTS},
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    return [Route(path, _file(*file), methods=["GET"], include_in_schema=False) for path, file in FILES.items()]


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (FOLDER / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return answer
