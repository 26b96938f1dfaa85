"""The files of the page: their types, and the headers that keep them to this server."""

from polybasic.deploy import Chain
from tests.deploy.serve.serving import serving


def test_the_page_is_served_with_its_policy(chain: Chain) -> None:
    with serving(chain, api_keys=("secret",)) as served:
        for path, kind in (
            ("/", "text/html"),
            ("/page/app.js", "text/javascript"),
            ("/page/markdown.js", "text/javascript"),
            ("/page/style.css", "text/css"),
            ("/page/icon.svg", "image/svg+xml"),
        ):
            found = served.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"].startswith(kind)
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
            assert found.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/missing.js", "/page/..%2f..%2fapp.py", "/page/%2e%2e/app.py"):
            assert served.get(path).status_code == 404
    with serving(chain, page=False) as served:
        assert served.get("/").status_code == 404
        assert served.get("/page/app.js").status_code == 404
        assert served.post("/markdown", {"text": "a"}).status_code == 404
