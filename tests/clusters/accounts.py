"""The accounts on fake hosts: the machine's, but root's home folder is one of the cluster."""

import pwd
from pathlib import Path


def write_accounts(folder: Path, home: Path) -> dict[Path, Path]:
    """Writes passwd and shadow files with `home` as root's home folder; returns the binds for `Hosts`.

    Some programs, ssh and Grid Engine among them, use the account's home, which would be the machine's, and not HOME.
    """
    passwd, shadow = folder / "passwd", folder / "shadow"
    accounts = [
        account if account.pw_name != "root" else pwd.struct_passwd((*account[:5], str(home), account.pw_shell))
        for account in pwd.getpwall()
    ]
    passwd.write_text("".join(":".join(map(str, account)) + "\n" for account in accounts))
    # No password, but not locked: many machines lock root, and sshd then refuses a key, too.
    shadow.touch(mode=0o600)
    shadow.write_text("".join(f"{account.pw_name}:*:20000:0:99999:7:::\n" for account in accounts))
    return {passwd: Path("/etc/passwd"), shadow: Path("/etc/shadow")}
