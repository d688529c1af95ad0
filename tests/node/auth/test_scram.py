"""SCRAM as scramp does it."""

import pytest
from scramp import ScramException, ScramMechanism

from tests.support.sample_users import ALICE
from upriver.node.auth.scram import DIGEST_BYTES, SCRAM, scramp
from upriver.node.auth.users_file import ITERATIONS_MIN


def test_other_users_of_scramp_keep_its_rules() -> None:
    server = ScramMechanism("SCRAM-SHA-1").make_server(lambda name: ALICE.credentials["SCRAM-SHA-1"])
    with pytest.raises(ScramException, match="Nonce contains invalid characters"):
        server.set_client_first("n,,n=alice,r=no nce")


@pytest.mark.parametrize("mechanism", SCRAM)
def test_each_mechanism_has_a_hash_of_its_length(mechanism: str) -> None:
    _, stored_key, server_key, _ = scramp().mechanisms[mechanism].make_auth_info("secret", ITERATIONS_MIN)
    assert len(stored_key) == len(server_key) == DIGEST_BYTES[mechanism]
