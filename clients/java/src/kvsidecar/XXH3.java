package kvsidecar;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * XXH3-64 without a seed, the checksum of payloads
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, section XXH3).
 */
public final class XXH3 {
    private static final long PRIME32_1 = 0x9E3779B1L;
    private static final long PRIME32_2 = 0x85EBCA77L;
    private static final long PRIME32_3 = 0xC2B2AE3DL;
    private static final long PRIME64_1 = 0x9E3779B185EBCA87L;
    private static final long PRIME64_2 = 0xC2B2AE3D27D4EB4FL;
    private static final long PRIME64_3 = 0x165667B19E3779F9L;
    private static final long PRIME64_4 = 0x85EBCA77C2B2AE63L;
    private static final long PRIME64_5 = 0x27D4EB2F165667C5L;
    private static final long MIXER_1 = 0x165667919E3779F9L;
    private static final long MIXER_2 = 0x9FB21C651E98DF25L;
    private static final int STRIPE = 64;
    private static final int STRIPES_PER_BLOCK = 16;
    private static final String SECRET_HEX = "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
            + "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
            + "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
            + "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
            + "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
            + "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e";
    private static final ByteBuffer SECRET = secret();

    private XXH3() {}

    /** Hash of all bytes. */
    public static long hash(byte[] bytes) {
        ByteBuffer data = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
        int n = bytes.length;
        if (n > 240) {
            return longer(data, n);
        }
        if (n > 16) {
            return medium(data, n);
        }
        if (n > 8) {
            long low = data.getLong(0) ^ key(24) ^ key(32);
            long high = data.getLong(n - 8) ^ key(40) ^ key(48);
            return avalanche(n + Long.reverseBytes(low) + high + folded(low, high));
        }
        if (n > 3) {
            long head = data.getInt(0) & 0xFFFFFFFFL;
            long tail = data.getInt(n - 4) & 0xFFFFFFFFL;
            long h = tail + (head << 32) ^ key(8) ^ key(16);
            h ^= Long.rotateLeft(h, 49) ^ Long.rotateLeft(h, 24);
            h *= MIXER_2;
            h ^= (h >>> 35) + n;
            h *= MIXER_2;
            return h ^ h >>> 28;
        }
        if (n > 0) {
            int packed = (bytes[0] & 255) << 16 | (bytes[n >> 1] & 255) << 24 | bytes[n - 1] & 255 | n << 8;
            return avalanche64((packed ^ SECRET.getInt(0) ^ SECRET.getInt(4)) & 0xFFFFFFFFL);
        }
        return avalanche64(key(56) ^ key(64));
    }

    private static long medium(ByteBuffer data, int n) {
        long sum = n * PRIME64_1;
        if (n <= 128) {
            for (int i = (n - 1) / 32; i >= 0; i--) {
                sum += mixed(data, 16 * i, 32 * i) + mixed(data, n - 16 * (i + 1), 32 * i + 16);
            }
            return avalanche(sum);
        }
        for (int i = 0; i < 8; i++) {
            sum += mixed(data, 16 * i, 16 * i);
        }
        sum = avalanche(sum);
        for (int i = 8; i < n / 16; i++) {
            sum += mixed(data, 16 * i, 16 * (i - 8) + 3);
        }
        return avalanche(sum + mixed(data, n - 16, 136 - 17));
    }

    private static long longer(ByteBuffer data, int n) {
        long[] lanes = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
        for (int i = 0; i < (n - 1) / STRIPE; i++) {
            accumulate(lanes, data, STRIPE * i, 8 * (i % STRIPES_PER_BLOCK));
            if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) {
                for (int lane = 0; lane < lanes.length; lane++) {
                    lanes[lane] = (lanes[lane] ^ lanes[lane] >>> 47 ^ key(128 + 8 * lane)) * PRIME32_1;
                }
            }
        }
        accumulate(lanes, data, n - STRIPE, 121);
        long sum = n * PRIME64_1;
        for (int i = 0; i < 4; i++) {
            sum += folded(lanes[2 * i] ^ key(11 + 16 * i), lanes[2 * i + 1] ^ key(19 + 16 * i));
        }
        return avalanche(sum);
    }

    private static void accumulate(long[] lanes, ByteBuffer data, int at, int secretAt) {
        for (int i = 0; i < lanes.length; i++) {
            long value = data.getLong(at + 8 * i);
            long keyed = value ^ key(secretAt + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (keyed & 0xFFFFFFFFL) * (keyed >>> 32);
        }
    }

    private static long mixed(ByteBuffer data, int at, int secretAt) {
        return folded(data.getLong(at) ^ key(secretAt), data.getLong(at + 8) ^ key(secretAt + 8));
    }

    /** XOR of both halves of the unsigned product; multiplyHigh computes the signed product. */
    private static long folded(long a, long b) {
        return Math.multiplyHigh(a, b) + (a >> 63 & b) + (b >> 63 & a) ^ a * b;
    }

    private static long avalanche(long h) {
        h ^= h >>> 37;
        h *= MIXER_1;
        return h ^ h >>> 32;
    }

    private static long avalanche64(long h) {
        h ^= h >>> 33;
        h *= PRIME64_2;
        h ^= h >>> 29;
        h *= PRIME64_3;
        return h ^ h >>> 32;
    }

    private static long key(int at) {
        return SECRET.getLong(at);
    }

    private static ByteBuffer secret() {
        byte[] bytes = new byte[SECRET_HEX.length() / 2];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) Integer.parseInt(SECRET_HEX, 2 * i, 2 * i + 2, 16);
        }
        return ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    }
}
