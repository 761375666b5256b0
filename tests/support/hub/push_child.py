"""Pushes the files of `client.NEW` as v2, in a process that a test can kill; the environment says
where to."""

from support.hub.client import NEW, REPO, planned, push_files

from flashmap.release.hub import HubRepo
from flashmap.release.verify import arrives

if __name__ == "__main__":
    push_files(NEW, verify=arrives(HubRepo(REPO), planned(NEW)))
