#!/usr/bin/env python3
"""Writes a container image of one layer as a tar that containerd imports and docker loads. Needs neither a daemon nor a registry."""

import argparse
import hashlib
import io
import json
import os
import tarfile
import tempfile


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    layer = parser.add_mutually_exclusive_group(required=True)
    layer.add_argument("--root", help="folder whose content becomes the layer, all of it root's")
    layer.add_argument("--layer", help="tar that becomes the layer as it is")
    parser.add_argument("--ref", action="append", required=True, help="name:tag, as often as the image has names")
    parser.add_argument("--entrypoint", nargs="+")
    parser.add_argument("--user", default="")
    parser.add_argument("--stop-signal", default="")
    parser.add_argument("--env", action="append", default=[])
    return parser.parse_args()


def owned_by_root(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def write_layer(root, file):
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(os.listdir(root)):
            tar.add(os.path.join(root, name), arcname=name, filter=owned_by_root)


def digest(file):
    file.seek(0)
    return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def blob(value):
    data = json.dumps(value).encode()
    return data, {"digest": "sha256:" + hashlib.sha256(data).hexdigest(), "size": len(data)}


def path(descriptor):
    return "blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")


def write(args, layer):
    layer_is = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(layer), "size": layer.seek(0, os.SEEK_END)}
    variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **dict(e.split("=", 1) for e in args.env)}
    settings = {"Env": [f"{k}={v}" for k, v in variables.items()], "Entrypoint": args.entrypoint, "User": args.user, "StopSignal": args.stop_signal}
    config, config_is = blob({
        "created": "1970-01-01T00:00:00Z",
        "architecture": "amd64",
        "os": "linux",
        "config": {key: value for key, value in settings.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [layer_is["digest"]]},
        "history": [{"created": "1970-01-01T00:00:00Z"}],
    })
    config_is["mediaType"] = "application/vnd.oci.image.config.v1+json"
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest, manifest_is = blob({"schemaVersion": 2, "mediaType": kind, "config": config_is, "layers": [layer_is]})
    index, _ = blob({"schemaVersion": 2, "manifests": [
        {"mediaType": kind, **manifest_is, "platform": {"architecture": "amd64", "os": "linux"},
         "annotations": {"io.containerd.image.name": ref, "org.opencontainers.image.ref.name": ref.rsplit(":", 1)[1]}}
        for ref in args.ref
    ]})
    saved, _ = blob([{"Config": path(config_is), "RepoTags": args.ref, "Layers": [path(layer_is)]}])
    with tarfile.open(args.out, "w") as tar:
        for name, data in [("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), ("index.json", index), ("manifest.json", saved),
                           (path(config_is), config), (path(manifest_is), manifest)]:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        entry = tarfile.TarInfo(path(layer_is))
        entry.size = layer_is["size"]
        layer.seek(0)
        tar.addfile(entry, layer)
    print(manifest_is["digest"])


def main():
    args = arguments()
    if args.layer:
        with open(args.layer, "rb") as layer:
            write(args, layer)
        return
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(args.out))) as layer:
        write_layer(args.root, layer)
        write(args, layer)


main()
