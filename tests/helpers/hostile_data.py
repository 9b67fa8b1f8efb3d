"""Raw data that takes memory without end, blocks, or goes in circles. Used by the tests and by ``tests/campaigns``.

Each function makes its data in a folder and returns the data set's kind and path.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Source = tuple[str, Path]


def npz(folder: Path, **changes: np.ndarray) -> Source:
    images = np.zeros((4, 2, 2, 1), np.uint8)
    labels = np.array([0, 1, 0, 1])
    arrays = dict(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    np.savez_compressed(folder / "a.npz", **{**arrays, **changes})
    return "npz", folder / "a.npz"


def declared_npz(folder: Path, name: str, shape: tuple[int, ...], dtype: str, content: bytes = b"") -> Source:
    """An array that declares far more elements than there are bytes."""
    kind, path = npz(folder)
    with zipfile.ZipFile(path) as old:
        members = {member: old.read(member) for member in old.namelist() if member != f"{name}.npy"}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as new:
        for member, data in {**members, f"{name}.npy": header.getvalue() + content}.items():
            new.writestr(member, data)
    return kind, path


def npz_of_a_terabyte(folder: Path) -> Source:
    return declared_npz(folder, "train_images", (10**9, 32, 32, 1), "|u1", b"\0" * 64)


def npz_of_long_names(folder: Path) -> Source:
    return declared_npz(folder, "class_names", (10**6,), "<U1000000", b"\0" * 64)


def npz_with_images_without_labels(folder: Path) -> Source:
    """60 MB of zeros in 60 kB, refused by the number of labels before they are unpacked."""
    return npz(folder, train_images=np.zeros((15_000_000, 2, 2, 1), np.uint8))


def npz_with_label_1e8(folder: Path) -> Source:
    return npz(folder, train_labels=np.array([0, 1, 0, 10**8]))


def npz_with_label_2_to_62(folder: Path) -> Source:
    return npz(folder, train_labels=np.array([0, 1, 0, 2**62]))


def npz_with_test_label_2_to_62(folder: Path) -> Source:
    return npz(folder, test_labels=np.array([0, 1, 0, 2**62]))


def npz_that_is_a_pipe(folder: Path) -> Source:
    os.mkfifo(folder / "a.npz")
    return "npz", folder / "a.npz"


def npz_that_is_a_device(folder: Path) -> Source:
    (folder / "a.npz").symlink_to("/dev/zero")
    return "npz", folder / "a.npz"


def tar_gz(folder: Path, members: dict[str, int], pax: dict[str, str] | None = None) -> Source:
    """Members of so many zeros."""
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, size in members.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size, member.pax_headers = size, pax or {}
            tar.addfile(member, io.BytesIO(bytes(size)))
    return "cifar10", path


def tar_with_a_large_batch(folder: Path) -> Source:
    return tar_gz(folder, {"data_batch_1": 100_000_000})


def tar_with_a_large_readme(folder: Path) -> Source:
    return tar_gz(folder, {"readme.html": 100_000_000})


def tar_of_many_members(folder: Path) -> Source:
    return tar_gz(folder, {f"readme_{number}": 40_000_000 for number in range(8)})


def tar_with_a_long_header(folder: Path) -> Source:
    return tar_gz(folder, {"data_batch_1": 10}, pax={"comment": "x" * 300_000_000})


def tiny_zip(folder: Path, members: dict[str, bytes]) -> Source:
    path = folder / "tiny-imagenet-200.zip"
    wnid = "n00000001"
    lists = {
        "wnids.txt": wnid.encode(),
        "words.txt": b"",
        "val/val_annotations.txt": f"val_0.JPEG\t{wnid}\n".encode(),
        f"train/{wnid}/images/{wnid}_0.JPEG": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {**lists, **members}.items():
            file.writestr(f"tiny-imagenet-200/{name}", content)
    return "tinyimagenet", path


def zip_with_a_long_list(folder: Path) -> Source:
    return tiny_zip(folder, {"words.txt": bytes(50_000_000)})


def zip_with_a_large_image(folder: Path) -> Source:
    return tiny_zip(folder, {"train/n00000001/images/n00000001_0.JPEG": bytes(50_000_000)})


def image_folder(folder: Path) -> Source:
    for place in ("train/a/0.png", "train/b/0.png", "test/a/0.png"):
        (folder / place).parent.mkdir(parents=True)
        Image.new("L", (5, 4), 7).save(folder / place)
    return "imagefolder", folder


def png(width: int, height: int) -> bytes:
    """The start of an image of this size; its pixels would all be zero."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )


def png_of_many_pixels(folder: Path, width: int = 100_000) -> Source:
    source = image_folder(folder)
    for place in ("train/a/0.png", "train/b/0.png", "test/a/0.png"):
        (folder / place).write_bytes(png(width, 10_000))
    return source


def png_that_pillow_warns_of(folder: Path) -> Source:
    return png_of_many_pixels(folder, width=10_000)


def jpeg_of_many_pixels(folder: Path) -> Source:
    kind, _ = image_folder(folder)
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "JPEG")
    # The size in the frame header.
    huge = content.getvalue().replace(struct.pack(">BHH", 8, 8, 8), struct.pack(">BHH", 8, 65_000, 65_000))
    (folder / "train" / "b" / "1.jpg").write_bytes(huge)
    return kind, folder


def sparse_image_file(folder: Path) -> Source:
    source = image_folder(folder)
    with (folder / "train" / "b" / "0.png").open("r+b") as file:
        file.truncate(1 << 40)
    return source


def link_to_its_own_folder(folder: Path) -> Source:
    source = image_folder(folder)
    (folder / "train" / "a" / "again").symlink_to(".")
    return source


def links_in_circles(folder: Path) -> Source:
    """Without a bound, two such links are followed along 2**40 ways."""
    source = image_folder(folder)
    for name in ("b", "c"):
        (folder / "train" / "a" / f"to_{name}").symlink_to("../..")
    return source


def link_to_itself(folder: Path) -> Source:
    source = image_folder(folder)
    (folder / "train" / "a" / "1.png").symlink_to("1.png")
    return source


def link_to_nothing(folder: Path) -> Source:
    source = image_folder(folder)
    (folder / "train" / "a" / "1.png").symlink_to("nowhere.png")
    return source


def link_to_a_device(folder: Path) -> Source:
    source = image_folder(folder)
    (folder / "train" / "a" / "1.png").symlink_to("/dev/zero")
    return source


def pipe_among_images(folder: Path) -> Source:
    source = image_folder(folder)
    os.mkfifo(folder / "train" / "a" / "1.png")
    return source


def socket_among_images(folder: Path) -> Source:
    source = image_folder(folder)
    # Bound by a short name: paths of sockets are limited to about 100 characters.
    descriptor = os.open(folder / "train" / "a", os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{descriptor}/1.png")
    finally:
        os.close(descriptor)
    return source


def pipe_among_batches(folder: Path) -> Source:
    (folder / "test_batch").write_bytes(b"")
    os.mkfifo(folder / "data_batch_1")
    return "cifar10", folder


def large_batch(folder: Path) -> Source:
    for name in ("test_batch", "data_batch_1"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)
    return "cifar10", folder


HOSTILE: tuple[tuple[Callable[[Path], Source], str], ...] = (
    (npz_of_a_terabyte, "not a complete .npz"),
    (npz_of_long_names, "not a complete .npz"),
    (npz_with_images_without_labels, "15000000 images and 4 labels"),
    (npz_with_label_1e8, "got label 100000000 among 4 training images"),
    (npz_with_label_2_to_62, "got label 4611686018427387904 among 4 training images"),
    (npz_with_test_label_2_to_62, "test label 4611686018427387904"),
    (npz_that_is_a_pipe, "is not a file or folder"),
    (npz_that_is_a_device, "is not a file or folder"),
    (tar_with_a_large_batch, "data_batch_1: 100000000 bytes, expected at most"),
    (tar_with_a_large_readme, "readme.html: 100000000 bytes, expected at most"),
    (tar_of_many_members, "bytes, expected at most"),
    (tar_with_a_long_header, "decompressed: .* bytes, expected at most"),
    (zip_with_a_long_list, "words.txt: 50000000 bytes, expected at most"),
    (zip_with_a_large_image, "_0.JPEG: 50000000 bytes, expected at most"),
    (png_of_many_pixels, "0.png: cannot be decoded .*decompression bomb"),
    (png_that_pillow_warns_of, "0.png: cannot be decoded .*decompression bomb"),
    (jpeg_of_many_pixels, "1.jpg: cannot be decoded .*decompression bomb"),
    (sparse_image_file, "0.png: 1099511627776 bytes, expected at most"),
    (link_to_its_own_folder, "again: links lead back to .*/train/a, which it is in"),
    (links_in_circles, "to_./train: links lead back to .*/train, which it is in"),
    (link_to_itself, "1.png: cannot be read .Too many levels of symbolic links"),
    (link_to_nothing, "1.png: not a regular file"),
    (link_to_a_device, "1.png: not a regular file"),
    (pipe_among_images, "1.png: not a regular file"),
    (socket_among_images, "1.png: not a regular file"),
    (pipe_among_batches, "data_batch_1: not a regular file"),
    (large_batch, "data_batch_1: 1099511627776 bytes, expected at most"),
)
