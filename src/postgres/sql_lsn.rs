//! Conversion of LSNs in SQL parameters and results, in the binary format of the type `pg_lsn`.

use std::error::Error;

use bytes::BytesMut;
use postgres_protocol::types::{lsn_from_sql, lsn_to_sql};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

use crate::model::lsn::Lsn;

impl FromSql<'_> for Lsn {
    accepts!(PG_LSN);

    fn from_sql(_: &Type, raw: &[u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        lsn_from_sql(raw).map(Self)
    }
}

impl ToSql for Lsn {
    accepts!(PG_LSN);
    to_sql_checked!();

    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        lsn_to_sql(self.0, out);
        Ok(IsNull::No)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_an_lsn_as_eight_bytes_in_network_order() {
        let lsn = Lsn(0x16_B374_D848);
        let mut out = BytesMut::new();
        lsn.to_sql(&Type::PG_LSN, &mut out).expect("encodes");
        assert_eq!(out[..], [0, 0, 0, 0x16, 0xB3, 0x74, 0xD8, 0x48]);
        assert_eq!(Lsn::from_sql(&Type::PG_LSN, &out).expect("decodes"), lsn);
        assert!(Lsn::from_sql(&Type::PG_LSN, &out[1..]).is_err());
        assert!(!<Lsn as FromSql>::accepts(&Type::INT8));
    }
}
