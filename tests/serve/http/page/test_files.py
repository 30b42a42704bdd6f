"""What the files of the page hold, without a browser."""

import re

from .scripted_server import PAGE


def test_no_file_of_the_page_writes_markup_or_reaches_outside() -> None:
    files = {path.name: path.read_text("utf-8") for path in PAGE.iterdir()}
    for name, text in files.items():
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"//[a-z]+\.|https?:", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text), name
    html = files["index.html"]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", html)
    named = set(re.findall(r'(?:src|href)="\./page/([^"]+)"', html))
    imported = {name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | imported | {"index.html"} == set(files)
