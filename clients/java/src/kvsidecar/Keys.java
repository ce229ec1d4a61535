package kvsidecar;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import kvsidecar.cache.v1.Chunk.NamespaceDescriptor;

/** Keys of the cache. The specification is protos/kvsidecar/cache/v1/chunk.proto. */
public final class Keys {
    private Keys() {}

    /** Hash input of a namespace id: one line per field, in the order of field numbers. */
    public static String canonicalEncoding(NamespaceDescriptor d) {
        return line("model_fingerprint", hex(d.getModelFingerprint().toByteArray()))
                + line("architecture", escaped(d.getArchitecture()))
                + line("layers", Integer.toUnsignedString(d.getLayers()))
                + line("kv_heads", Integer.toUnsignedString(d.getKvHeads()))
                + line("head_dim", Integer.toUnsignedString(d.getHeadDim()))
                + line("dtype", Integer.toString(d.getDtypeValue()))
                + line("rope_parameters", escaped(d.getRopeParameters()))
                + line("format_version", Integer.toUnsignedString(d.getFormatVersion()))
                + line("quantizer_version", Integer.toUnsignedString(d.getQuantizerVersion()))
                + line("bits", Integer.toUnsignedString(d.getBits()))
                + line("lora_adapter", escaped(d.getLoraAdapter()))
                + line("tensor_parallel_rank", Integer.toUnsignedString(d.getTensorParallelRank()))
                + line("tensor_parallel_size", Integer.toUnsignedString(d.getTensorParallelSize()))
                + line("producer", escaped(d.getProducer()));
    }

    /** Id of everything that determines a chunk's bytes. */
    public static byte[] namespaceId(NamespaceDescriptor descriptor) {
        return hash("namespace", sized(canonicalEncoding(descriptor).getBytes(StandardCharsets.UTF_8)));
    }

    /** The root of a tenant's chunks in a namespace. */
    public static byte[] tenantRoot(byte[] namespace, byte[] salt) {
        return hash("root", namespace, sized(salt));
    }

    /** Id of a tenant across namespaces. */
    public static byte[] tenantId(byte[] salt) {
        return hash("tenant", sized(salt));
    }

    /** Id of a chunk together with its whole prefix; the first chunk's parent is the tenant root. Tokens are
     * unsigned 32-bit numbers. */
    public static byte[] prefixHash(byte[] parent, int... tokens) {
        return hash("prefix", parent, counted(tokens));
    }

    /** Id of a chunk's tokens, independent of their position. */
    public static byte[] contentHash(byte[] root, int... tokens) {
        return hash("content", root, counted(tokens));
    }

    /** Key of a prompt's first tokens in the index summary. */
    public static byte[] headHash(byte[] root, int... tokens) {
        return hash("head", root, counted(tokens));
    }

    /** Lower-case hexadecimal. */
    public static String hex(byte[] bytes) {
        StringBuilder out = new StringBuilder(2 * bytes.length);
        for (byte b : bytes) {
            out.append(Character.forDigit(b >> 4 & 15, 16)).append(Character.forDigit(b & 15, 16));
        }
        return out.toString();
    }

    private static String line(String name, String value) {
        return name + "=" + value + "\n";
    }

    private static String escaped(String text) {
        return text.replace("\\", "\\\\").replace("\n", "\\n");
    }

    private static byte[] sized(byte[] part) {
        return littleEndian(4 + part.length).putInt(part.length).put(part).array();
    }

    private static byte[] counted(int... tokens) {
        ByteBuffer packed = littleEndian(4 + 4 * tokens.length).putInt(tokens.length);
        for (int token : tokens) {
            packed.putInt(token);
        }
        return packed.array();
    }

    private static ByteBuffer littleEndian(int bytes) {
        return ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
    }

    private static byte[] hash(String purpose, byte[]... parts) {
        try {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            digest.update(("kvsidecar/2/" + purpose).getBytes(StandardCharsets.US_ASCII));
            for (byte[] part : parts) {
                digest.update(part);
            }
            return digest.digest();
        } catch (NoSuchAlgorithmException never) {
            throw new IllegalStateException("every Java has SHA-256", never);
        }
    }
}
