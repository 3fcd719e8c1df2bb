"""What the scripts here share: plain HTTP to a running server, and its memory."""
import http.client
import json
import urllib.parse


class Server:
    def __init__(self, url, timeout=3600):
        self.address = urllib.parse.urlsplit(url).netloc
        self.timeout = timeout

    def connect(self):
        return http.client.HTTPConnection(self.address, timeout=self.timeout)

    def request(self, method, path, body=None, connection=None):
        """Status and body. Without a connection a new one is made and closed."""
        own = connection or self.connect()
        data = None if body is None else json.dumps(body)
        own.request(method, path, data, {} if data is None else {"Content-Type": "application/json"})
        response = own.getresponse()
        text = response.read()
        if connection is None:
            own.close()
        return response.status, text

    def post(self, path, body, connection=None):
        status, text = self.request("POST", path, body, connection)
        if status != 200:
            raise RuntimeError(f"{path}: status {status}: {text[:300].decode(errors='replace')}")
        return json.loads(text)

    def get(self, path):
        return json.loads(self.request("GET", path)[1])

    def metrics(self):
        """{name with labels: value}"""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def resident_bytes(pid):
    """Memory of a process that is in RAM."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
