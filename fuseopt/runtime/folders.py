"""Folders of trusted files: only the user or root may write what the process executes.

The files in a cache of kernels are code that the next process runs. So a folder, the
folders within it and their files must belong to the user (or to root). No other user
may have the right to write them. Symbolic links are not followed. One set of open
descriptors serves both the checks and the reads. So no other process can replace a
folder between the check and the read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
import weakref

from ..locks import new_lock

#: Flags with which opening a symbolic link fails, and opening a FIFO does not block.
_PLAIN = _FOLDER = 0
if os.name == "posix":
    _PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    _FOLDER = _PLAIN | os.O_DIRECTORY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: File in a private folder that is locked while its process lives.
_ALIVE = ".fuseopt-alive"
_NEW = ".new"
_PREFIX = "fuseopt-"
#: Seconds after its creation in which a private folder may lack that file.
_YOUNG = 3600.0


class Untrusted(OSError):
    """A user other than this one may have written the file."""


def chosen(cache_dir: str | None) -> str:
    """Return the absolute path of the folder of kernels."""
    if not cache_dir:
        try:
            import platformdirs  # few processes need it: options may name a folder
        except ImportError:
            # platformdirs is not installed; this is its answer on Linux
            cache_dir = "~/.cache/fuseopt"
        else:
            cache_dir = platformdirs.user_cache_dir("fuseopt")
    return os.path.abspath(os.path.expanduser(cache_dir))


def _check(info: os.stat_result, path: str) -> None:
    """Raise Untrusted unless a file or folder can be the user's own work.

    Where access control lists let other users write, the group's bits of the mode are
    set.
    """
    if info.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{path} belongs to another user, of id {info.st_uid}")
    if info.st_mode & _OTHERS_WRITE:
        raise Untrusted(
            f"users other than its owner may write {path}; if nobody did, `chmod -R "
            "go-w` makes it usable"
        )


class Folder:
    """Open folder that only the user, or root, may write. A context closes it.

    `path` is for messages, and for uses that take no descriptor.
    """

    def __init__(self, handle: int, path: str) -> None:
        self.handle = handle
        self.path = path
        try:
            _check(os.fstat(handle), path)
        except OSError:
            os.close(handle)
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    @classmethod
    def open(cls, path: str, make: bool = False) -> Folder:
        """Open a folder by its absolute path; `make` it, and its parents, if need be.

        Any user may own its parents: only the folder itself is checked.
        """
        if os.name != "posix":
            raise Untrusted("only POSIX systems show who may write a folder")
        if make:
            _make_all(path)
        return cls(_open_folder(path, path), path)

    def enter(self, name: str, make: bool = False) -> Folder:
        """Open a folder in this one."""
        path = os.path.join(self.path, name)
        if make:
            _make(name, self.handle)
        return Folder(_open_folder(name, path, self.handle), path)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises Untrusted if another user may write it."""
        with open(self._open(name, os.O_RDONLY), "rb") as file:
            path = os.path.join(self.path, name)
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise Untrusted(f"{path} is not a regular file")
            _check(info, path)
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a new file that only the user may read or write."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(self._open(name, flags), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)

    def close_to_others(self, name: str) -> None:
        """Restrict a file that another program made to its user."""
        handle = self._open(name, os.O_RDONLY)
        try:
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)

    def move(self, name: str, to: Folder, new: str) -> None:
        """Move a file to another folder, in place of a file there, atomically."""
        os.replace(name, new, src_dir_fd=self.handle, dst_dir_fd=to.handle)

    def names(self) -> list[str]:
        """Return the names of the files and folders in it."""
        return os.listdir(self.handle)

    def age(self, name: str, now: float) -> float:
        """Return the seconds since the last change of an entry; 0 if it is gone."""
        try:
            return now - self._stat(name).st_mtime
        except OSError:
            return 0.0

    def holds(self, name: str) -> bool:
        """Is there a folder or a file of that name?"""
        try:
            self._stat(name)
        except OSError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and all in it, as far as possible."""
        for _ in range(2):  # the compiler of a killed process may add a file meanwhile
            with contextlib.suppress(OSError):
                _remove(name, self.handle)

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.handle, follow_symlinks=False)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _PLAIN, 0o600, dir_fd=self.handle)


def _open_folder(name: str, path: str, within: int | None = None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except OSError:
        if os.path.islink(path):
            raise Untrusted(
                f"{path} is a symbolic link; name the folder it leads to"
            ) from None
        raise


def _make(name: str, within: int | None = None) -> None:
    """Make a folder, unless it exists, that only its user may use, with any umask."""
    try:
        os.mkdir(name, 0o700, dir_fd=within)
    except FileExistsError:
        return
    if os.stat(name, dir_fd=within, follow_symlinks=False).st_mode & 0o700 != 0o700:
        # a umask may restrict the user too
        os.chmod(name, 0o700, dir_fd=within)


def _make_all(path: str) -> None:
    try:
        _make(path)
    except FileNotFoundError:
        _make_all(os.path.dirname(path))
        _make(path)


def _remove(name: str, within: int) -> None:
    """Remove a file, or a folder and all in it. Follow no links."""
    info = os.stat(name, dir_fd=within, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=within)
        return
    handle = os.open(name, _FOLDER, dir_fd=within)
    try:
        for inner in os.listdir(handle):
            _remove(inner, handle)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=within)


class Private:
    """Temporary folder of this process alone, made on first use.

    It is removed at the end of the process. The folder of a killed process is removed
    by the next process that makes one, since the file in it is then no longer locked.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._path = ""
        self._process = 0

    @property
    def path(self) -> str:
        if os.name != "posix":
            raise Untrusted("only POSIX systems show who may write a folder")
        with self._lock:
            # a forked process needs another folder; a cleaner may have removed this one
            if self._process != os.getpid() or not os.path.isdir(self._path):
                self._path = tempfile.mkdtemp(prefix=_PREFIX)
                os.chmod(self._path, 0o700)
                self._process = os.getpid()
                keep = _mark(self._path)
                weakref.finalize(self, _end, self._path, self._process, keep)
                sweep_private()
            return self._path


def _end(path: str, process: int, handle: int | None) -> None:
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _mark(path: str) -> int | None:
    """Mark a folder as in use by a file that is locked while its process lives."""
    new = os.path.join(path, _NEW)
    handle = _locked(new, os.O_CREAT | os.O_EXCL)
    if handle is not None:
        # the file is never there without a lock while this process lives
        os.rename(new, os.path.join(path, _ALIVE))
    return handle


def _locked(path: str, flags: int = 0) -> int | None:
    """Return a file's descriptor, locked until it is closed, or None if that fails."""
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR | _PLAIN | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def sweep_private() -> None:
    """Remove the private folders of processes of this user that were killed."""
    root = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep_private(entry)


def _sweep_private(entry: os.DirEntry[str]) -> None:
    info = entry.stat(follow_symlinks=False)
    if info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode):
        return
    alive = os.path.join(entry.path, _ALIVE)
    handle = _locked(alive)
    if handle is not None:
        try:
            # the file that marks the folder goes last, since this process may be killed
            inner = os.open(entry.path, _FOLDER)
            try:
                for name in os.listdir(inner):
                    if name != _ALIVE:
                        _remove(name, inner)
            finally:
                os.close(inner)
            os.unlink(alive)
            os.rmdir(entry.path)
        finally:
            os.close(handle)
    elif time.time() - info.st_mtime > _YOUNG:
        if os.listdir(entry.path) == [_NEW]:
            os.unlink(os.path.join(entry.path, _NEW))
        os.rmdir(entry.path)  # fails for a folder without an owner that is not empty
